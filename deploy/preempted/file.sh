#!/bin/sh
# Ends with 0 once this file is there. In /run it is gone after a reboot, and the peer joins again.
test -e /run/cairn-preempted
