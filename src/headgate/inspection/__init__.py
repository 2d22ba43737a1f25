"""Tools for operators: what new settings change, whether a store is fit for limits, and what a service does now.

plan.py    headgate plan: the rules of two settings files, compared
doctor.py  headgate doctor: what a store says of itself, and what can be tried
top.py     headgate top: the rules of a running service and their rates
"""
