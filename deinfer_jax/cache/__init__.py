"""Paged key-value cache: host-side page allocator, layout of the device pools, and the views
programs attend through."""
