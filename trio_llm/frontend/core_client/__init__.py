"""The front end's end of the wire: sockets and engine processes."""
