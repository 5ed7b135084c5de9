"""The module server: one process that receives, trains and sends for one module."""
