"""The Trio side: requests in, text out. Never imports torch."""
