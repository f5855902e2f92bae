"""``autosync probe``: the links and hosts of a live job, measured, as a cluster and as constants of the replay.

`settings` says what to do, `job` runs inside every rank: `meter` (with `stream`) measures flows between nodes,
`survey` decides which (with `groups`), `shape` makes a `ClusterSpec` of them; `costs` measures hosts and `constants`
fits. `command` starts the ranks and `table` prints.
"""
