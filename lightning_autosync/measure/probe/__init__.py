"""``autosync probe``: the links and hosts of a live job, measured, as a cluster and as constants of the replay.

`settings` says what to do, `job` runs inside every rank. `links` measures the network: `meter` (with `stream` for rates
and `trips` for latencies) measures flows between nodes, `survey` decides which (with `groups`), `shape` makes a
`ClusterSpec` of them. `costs` measures hosts and `constants` fits. `command` starts the ranks and `table` prints.

Rates are told apart by direction. Latencies are halves of round trips, on idle links: the clocks of two hosts cannot be
compared. What load adds is told by direction again, by round trips while one way is full and the other is not.
"""
