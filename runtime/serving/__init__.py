"""Answers to requests over HTTP: a server, its protocol, and what computes the answers."""
