"""How a message is summed over ranks: one class for each kind of transfer."""
