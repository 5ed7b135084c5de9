"""Measurements for users: a link, the modules of a chain, a whole chain beside plain backprop."""
