"""Numerics: layers, gradient interfaces and the step of one module.

This needs torch only: no sockets, no processes.

Tensor names carry shape suffixes: ``B`` batch, ``X`` the shape of one sample at a module's input,
``H`` at its output, ``Y`` of a label, ``P`` of a prediction (the chain's output), ``C`` channels or
classes, ``T`` tokens, ``R`` rank.
"""
