"""Messages between front end and engine, and their codec. Pure."""
