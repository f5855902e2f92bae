"""Exchanges, which sum messages over ranks: one class for each kind of transfer."""
