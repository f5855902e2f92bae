"""Links of a cluster emulated on one Linux machine."""
