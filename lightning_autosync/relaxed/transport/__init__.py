"""Messages between live processes: connections, membership, heartbeats."""
