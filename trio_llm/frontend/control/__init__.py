"""The engine as the front end sees it: its state, and the calls that change it."""
