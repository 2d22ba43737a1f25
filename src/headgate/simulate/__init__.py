"""Simulate a fleet of hybrid limiters: how many calls all processes together admit, and how many trips they make.

    from headgate.simulate import Scenario, simulate

fleet.py     the fleet with leases, and the naive design for comparison
regions.py   a fleet in several regions
scenario.py  what happens to a fleet, and the outcome
traces.py    how calls come over time
plot.py      a picture of outcomes
__main__.py  the command line
"""

from headgate.simulate.fleet import naive, simulate
from headgate.simulate.scenario import Outcome, Scenario

__all__ = ["Outcome", "Scenario", "naive", "simulate"]
