"""The page that shows the swarm: plain HTTP, no build step, live by server-sent events, read-only.

`api` gives the answers, `endpoints` lists them, `app` has the routes, `feed` the live updates, and `server` runs it.
`static` is what browsers get: own files, and uPlot and Pico CSS with their licences in `static/vendor`.
"""
