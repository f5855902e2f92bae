"""Messages between live processes: connections, membership and heartbeats."""
