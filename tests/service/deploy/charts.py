"""Render the chart with the library of Helm, in a process of its own: the library is Go, with threads of its own.

    python -m tests.service.deploy.charts CHART

It reads a list of values as JSON and writes, for each of them, the manifests or what is wrong with the values.
"""

import json
import sys


def main() -> None:
    from helm_python import Chart, HelmError, lint

    rendered: list[dict[str, str] | str] = []
    for values in json.load(sys.stdin):
        try:
            chart = Chart.load(sys.argv[1])
            chart.validate_schema(values)
            rendered.append(chart.render(values, name="try", namespace="headgate"))
        except HelmError as error:
            rendered.append(str(error))
    json.dump({"rendered": rendered, "lint": lint(sys.argv[1], {"redis": {"password": "x"}}, strict=True)}, sys.stdout)


if __name__ == "__main__":
    main()
