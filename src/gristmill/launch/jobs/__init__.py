"""Jobs for clusters, from templates: described, submitted, asked about, ended."""
