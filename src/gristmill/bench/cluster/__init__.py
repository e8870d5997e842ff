"""Checks of the processes, links, devices and disks of a cluster before a long run."""
