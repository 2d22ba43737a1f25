"""Where Django looks for commands.

commands/  manage.py headgate
"""
