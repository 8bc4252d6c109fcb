"""The page that shows the swarm: plain HTTP, no build step, live by server-sent events.

`app` has the routes, `feed` the live updates, `server` runs it, `static` is what browsers get: own files, and uPlot and
Pico CSS with their licences in `static/vendor`. Nothing here changes anything: all of it is read-only.
"""
