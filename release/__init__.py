"""What a release is made of, and how it is checked; CONTRIBUTING.md says in which order.

wheel.py     `make wheel`: the source archive, the wheels built from it, their checks, and their tests as installed
smoke.py     what an installed wheel must do on every platform, with the standard library alone
contents.py  what an archive must hold and must not hold
sbom.py      `make sbom`: what the wheel and each of its extras bring along, as CycloneDX
ready.py     `make release-check`: version, changelog, tag, and the wheels that the workflow will build
"""
