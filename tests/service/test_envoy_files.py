"""The YAML of envoyproxy/ratelimit: read as it is, and refused with the line where that refuses it."""

import re
from pathlib import Path

import pytest

from headgate.service.envoy_settings import EnvoyDescriptor, rule_names
from headgate.service.files import Sources
from headgate.service.settings import BadFile
from tests.support.envoy import read


def only(text: str) -> EnvoyDescriptor:
    _, [domain] = read(text)
    [one] = domain.descriptors
    return one


LIMIT = "rate_limit: {unit: minute, requests_per_unit: 1}"
A = "domain: d\ndescriptors:\n  - key: a\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "the domain is missing or empty"),
        ("domain: ''\ndescriptors: []", 1, "the domain is missing or empty"),
        ("descriptors: []", 1, "the domain is missing or empty"),
        ("domain: d\nrules: []", 2, "a file has no field 'rules'; known are domain, descriptors"),
        ("domain: d\ndescriptors: {key: a}", 2, "descriptors is a list; write - key: name"),
        ("domain: d\ndescriptors:\n  - key: a\n  - b", 4, "descriptors is a list of mappings"),
        ("domain: d\ndescriptors:\n  - [a]", 3, "descriptors is a list of mappings"),
        ("- domain: d", 1, "a file is a mapping with domain, descriptors"),
        ("domain: d\ndescriptors:\n  - value: a", 3, "a descriptor needs a key; write key: name"),
        ("domain: d\ndescriptors:\n  - value: a\n    key: ''", 4, "a descriptor needs a key"),
        ("domain: d\ndescriptors:\n  - key: a*", 3, "has a \\*, which is for values"),
        ("domain: d\ndescriptors:\n  - key: a\n    ratelimit: {}", 4, "no field 'ratelimit'; known are key, value"),
        ("domain: d\ndescriptors:\n  - key: a\n    unit: day", 4, "no field 'unit'; unit belongs to rate_limit"),
        (
            f"domain: d\ndescriptors:\n  - key: a\n    {LIMIT[:-1]}, shadow_mode: true}}",
            4,
            "rate_limit has no field 'shadow_mode'; shadow_mode belongs to a descriptor, beside key",
        ),
        ("domain: d\ndescriptors:\n  - key: a\n    1: 2", 4, "the name of a field is a text"),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit: 5", 4, "rate_limit is a mapping with unit"),
        (
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit:\n      requests_per_unit: 1\n      unit: fortnight",
            6,
            "unknown unit 'fortnight'; use one of second, minute, hour, day, month, year, week",
        ),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit:\n      requests_per_unit: 1", 5, "the unit is missing"),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: unknown}", 4, "unknown unit"),
        *[
            (
                f"{A}    rate_limit:\n      unit: day\n      requests_per_unit: {number}",
                6,
                "requests_per_unit is a whole number from 0 to 4294967295, got",
            )
            for number in ("-1", "1.5", "5e9", "5e+9", "4294967296", "'60'", "1:30", "many", "[1]")
        ],
        (
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unlimited: true, unit: day}",
            4,
            "an unlimited rate_limit has no unit",
        ),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unlimited: 1, unit: day}", 4, "unlimited is true or"),
        (
            f"domain: d\ndescriptors:\n  - key: a\n    {LIMIT}\n    shadow_mode: 'true'",
            5,
            "shadow_mode is true or false",
        ),
        (f"domain: d\ndescriptors:\n  - key: a\n    {LIMIT}\n    share_threshold: true", 5, "share_threshold is for a"),
        ("domain: d\ndescriptors:\n  - key: a\n    value: 1.10", 4, 'value is a text; write value: "1.10"'),
        ("domain: d\ndescriptors:\n  - key: a\n    value: [b]", 4, "value is a text, not a sequence"),
        ("domain: d\ndescriptors:\n  - key: a\n    metadata: [b]", 4, "metadata is a mapping"),
        (
            f"domain: d\ndescriptors:\n  - key: a\n  - key: a\n    {LIMIT}",
            4,
            "second descriptor with the key 'a' without",
        ),
        (
            A + "    descriptors:\n      - {key: a, value: 1}\n      - {key: a, value: '1'}",
            6,
            "second descriptor with the key 'a' with the value '1'",
        ),
        (
            A + "    rate_limit:\n      unit: day\n      name: x\n      replaces:\n        - name: x",
            8,
            "'x' would replace itself",
        ),
        (
            "domain: d\ndescriptors:\n  - key: a\n    rate_limit:\n      unit: day\n      replaces: [{name: ''}]",
            6,
            "needs the name of a rate_limit",
        ),
        ("domain: d\ndescriptors:\n  - key: a\n    rate_limit: {unit: day, replaces: [x]}", 4, "replaces is a list of"),
        ("domain: d\ndomain: e", 2, "'domain' is given twice"),
        ("domain: d\ndescriptors: [", 2, "this is no YAML"),
        ("domain: d\ndescriptors: " + "[" * 1500, 1, "nested too deeply"),
        ("domain: d\ndescriptors: &a\n  - key: a\n    descriptors: *a", 2, "nested more than 32 deep"),
    ],
    ids=lambda value: f"{value!s:.30}",
)
def test_refused(text: str, line: int, why: str) -> None:
    """A file that cannot be used is refused, with its line and what would be right."""
    with pytest.raises(BadFile, match=rf"a\.yaml:{line}: .*{why}"):
        read(text)


def test_duplicate_domain() -> None:
    """A domain is in one file, unless domains are merged; then a descriptor is in one of its files."""
    one, two = "domain: d\ndescriptors: [{key: a}]", "domain: d\ndescriptors: [{key: b}]"
    with pytest.raises(BadFile, match=r"b\.yaml:1: the domain 'd' is in another file, too"):
        read(one, two)
    _, [domain] = read(one, two, settings="merge_domains = true")
    assert [found.key for found in domain.descriptors] == ["a", "b"]
    with pytest.raises(BadFile, match=r"b\.yaml:2: there is a second descriptor with the key 'a'"):
        read(one, one, settings="merge_domains = true")


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("007", "007"),
        ("yes", "yes"),
        ("true", "true"),
        ("0x1F", "0x1F"),
        ("2026-11-18", "2026-11-18"),
        ("~", ""),
        ("", ""),
    ],
)
def test_values_count_as_written(written: str, text: str) -> None:
    """A value that YAML takes for a number, a date or a switch is a text."""
    assert only(f"domain: d\ndescriptors:\n  - key: a\n    value: {written}").value == text


@pytest.mark.parametrize(
    ("written", "count"), [("0", 0), ("1_000", 1000), ("0x10", 16), ("010", 8), ("4294967295", 4294967295)]
)
def test_counts(written: str, count: int) -> None:
    """Whole numbers may be written in every way of YAML 1.1."""
    one = only(f"domain: d\ndescriptors: [{{key: a, rate_limit: {{unit: day, requests_per_unit: {written}}}}}]")
    assert one.rate_limit is not None and one.rate_limit.requests_per_unit == count


def test_all_fields() -> None:
    """Anchors, merges, nulls and every field of the format are read."""
    text = """
domain: d
descriptors:
  - key: a
    rate_limit: &limit
      unit: Hour
      requests_per_unit: 5
      name: first
      replaces:
        - name: second
  - key: b
    value: "x*"
    shadow_mode: yes
    quota_mode: on
    detailed_metric: true
    value_to_metric: True
    share_threshold: y
    metadata: {any: [thing, 1.5, {1: 2}]}
    rate_limit:
      <<: [*limit, {unit: day, name: later}]
      requests_per_unit: 6
    descriptors:
      - key: c
        rate_limit:
        descriptors:
"""
    _, [domain] = read(text)
    a, b = domain.descriptors
    assert a.rate_limit is not None and b.rate_limit is not None
    assert (a.rate_limit.unit, a.rate_limit.requests_per_unit, a.rate_limit.replaces) == (3, 5, ["second"])
    assert (b.rate_limit.unit, b.rate_limit.requests_per_unit, b.rate_limit.name) == (3, 6, "first")
    assert b.shadow_mode and b.quota_mode and b.detailed_metric and b.value_to_metric and b.share_threshold
    assert b.descriptors[0].key == "c" and b.descriptors[0].rate_limit is None
    assert [name for name, _ in rule_names("d", domain.descriptors)] == ["d/a", "d/b=x*"]


RULES = f"domain: shop\ndescriptors:\n  - key: a\n    {LIMIT}\n  - key: free\n    rate_limit: {{unlimited: true}}"


@pytest.mark.parametrize(
    ("settings", "line", "why"),
    [
        ('counting = "some"', 3, "envoy.counting: invalid enum value 'some'; use one of all_or_nothing, each"),
        ('algorithm = "magic"', 3, "envoy.algorithm: unknown algorithm 'magic'; use one of token_bucket"),
        ("filez = []", 3, "envoy.filez: there is no such setting; known are files, counting"),
        (
            '[envoy.rules."shop/b"]\ndrain = true',
            3,
            "the files have no rule of this name; known are shop, shop/a, shop",
        ),
        ('[envoy.rules."shop/a"]\nburst = 5', 4, "no such setting; known are algorithm, quotas, drain"),
        ('[envoy.rules."shop/a"]\nquotas = "5 a day"', 4, "cannot read the quota '5 a day'"),
        ('[envoy.rules."shop/a"]\nquotas = "5/day burst 9"', 4, "fixed_window has no burst"),
        ('[envoy.rules."shop/a"]\nalgorithm = "x"', 4, "unknown algorithm 'x'"),
        ('[envoy.rules.shop]\nquotas = "5/day"', 4, "quotas are for one rule; this is the name of a domain"),
        ('[envoy.rules."shop/free"]\nquotas = "5/day"', 4, "this rule is unlimited"),
    ],
)
def test_refused_settings(settings: str, line: int, why: str) -> None:
    """Settings that do not fit are refused, with the line of the settings."""
    with pytest.raises(BadFile, match=rf"headgate\.toml:{line}: .*{why}"):
        read(RULES, settings=settings)


def test_files(tmp_path: Path) -> None:
    """Files are named from the folder of the settings; a name without a file is an error, a stamp sees every change."""
    settings = tmp_path / "headgate.toml"
    settings.write_text('[envoy]\nfiles = ["limits/*.yaml", "more.yaml"]')
    (tmp_path / "limits").mkdir()
    (tmp_path / "limits" / "a.yaml").write_text(RULES)
    (tmp_path / "limits" / ".hidden.yaml").write_text("no: yaml of this kind")
    sources = Sources(settings, {}, {})
    first = sources.stamp()
    found = sources.read()
    with pytest.raises(BadFile, match=r"headgate\.toml:2: envoy\.files\.1: there is no file 'more\.yaml'"):
        sources.envoy_domains(found)
    (tmp_path / "more.yaml").write_text("domain: more")
    assert [one.domain for one in sources.envoy_domains(found)] == ["shop", "more"]
    stamp = sources.stamp(first)
    assert len(first) == 1 and len(stamp) == 3 and first.items() <= stamp.items()
    (tmp_path / "more.yaml").write_text("domain: other")
    assert sources.stamp() != stamp
    (tmp_path / "more.yaml").unlink()
    assert len(sources.stamp()) == 2


def test_the_documentation() -> None:
    """What docs/envoy.md shows as settings and rules can be used."""
    page = (Path(__file__).parents[2] / "docs" / "envoy.md").read_text()
    settings = re.findall(r"^```toml\n(.+?)^```", page, re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^```yaml\n(.+?)^```", page, re.DOTALL | re.MULTILINE)
    [text] = [block for block in shown if block.startswith("domain:")]
    child = "  - {key: route, value: /login, descriptors: [{key: remote_address, rate_limit: {unit: day}}]}"
    envoy, [domain] = read(f"{text}\n{child}", settings=settings[1])
    assert settings[0].startswith("grpc_port = 8081\n\n[envoy]\nfiles = ") and domain.domain == "shop"
    assert set(envoy.rules) == {"shop", "shop/route=/login|remote_address"}
