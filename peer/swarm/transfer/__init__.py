"""Blobs between peers: content-addressed, in chunks, from many providers at once.

`Scheduler` decides which chunk is requested from which provider, and when a failed request is repeated. It is a step
function without I/O, clock or event loop. `Fetch` drives it over the streams of a `StreamPool`; the
`CongestionController` of each stream bounds the requests under way on it. `BlobServer` is the serving side.
"""
