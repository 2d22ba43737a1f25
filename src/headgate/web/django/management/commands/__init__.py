"""Commands of `manage.py`.

headgate.py  the limits of the project, and where one client stands
"""
