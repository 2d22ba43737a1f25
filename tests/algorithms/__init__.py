"""What each algorithm promises: tables of scenarios, then an exact model of it."""
