"""Which tokens each step computes, and in which blocks. Pure."""
