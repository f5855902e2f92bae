"""``autosync probe``: measures the links and hosts of a live job, as a cluster and as constants of the replay.

`settings` describes a probe and `job` runs inside every rank. `meter` measures rates and round trips between nodes with
`flows`, `survey` decides what to measure, and `shape` builds a `ClusterSpec` from it. `costs` measures hosts,
`constants` fits the replay's constants, and `table` prints.

`quick` finds hosts and links only, in a few seconds, for a job that is about to train. Its `mesh_meter` measures over
connections that stay open. `description` compares what it found with a cluster file.

Rates are measured in each direction. Latencies are halves of round trips over idle links, since the clocks of two hosts
cannot be compared. The delay under load is measured in each direction, by round trips while only that one is full.
"""
