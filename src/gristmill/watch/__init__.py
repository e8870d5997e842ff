"""All runs of some folders on one page, while they train."""
