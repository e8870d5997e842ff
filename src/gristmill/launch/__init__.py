"""Floor 3: the processes of a run here (`processes`), `jobs` of clusters, and `tasks` of both."""
