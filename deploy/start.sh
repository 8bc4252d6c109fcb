#!/bin/sh
# Makes a machine a peer that joins at each boot. Run it from a clone, and again after `git pull` or for another invite:
#     sudo sh deploy/start.sh INVITE             # or - for a line of stdin
#     sudo sh deploy/start.sh INVITE aws         # leaves on the provider's notice, too: aws, gcp or file (preempted/)
# Debian 12 and 13, Ubuntu 22.04 and 24.04 (Python 3.10 to 3.13), with NVIDIA's driver 580 or newer. The invite is in
# /etc/cairn, Cairn in /opt/cairn, and what the peer keeps in /var/lib/cairn.
set -eu
umask 022
source=$(cd "$(dirname "$0")/.." && pwd)

fail() {
    echo "start.sh: $1" >&2
    exit "${2:-1}"
}

invite=${1:-} hook=${2:-}
case $#-$hook in
1- | 2-aws | 2-gcp | 2-file) ;;
*) fail "want: start.sh INVITE [aws|gcp|file]" 2 ;;
esac
[ "$(id -u)" = 0 ] || fail "installing needs root: run it with sudo"
[ "$invite" != - ] || invite=$(cat)

# torch.compile calls a C compiler, with Python's headers; two of the hooks call curl.
packages="gcc libc6-dev python3-dev python3-venv"
case $hook in aws | gcp) packages="$packages curl" ;; esac
if command -v apt-get >/dev/null && ! dpkg -s $packages >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    # A machine that has just booted may be upgrading itself.
    apt-get update || { sleep 30 && apt-get update; }
    apt-get -o DPkg::Lock::Timeout=600 install -y --no-install-recommends $packages
fi

# A peer from before must not run while its files change, and holds the devices that are to be measured.
unit=/etc/systemd/system/cairn-peer.service
if [ -e "$unit" ]; then
    systemctl stop cairn-peer
    trap '[ $? = 0 ] || systemctl start cairn-peer' EXIT # after a failure that peer goes on
fi
[ -x /opt/cairn/bin/pip ] || python3 -m venv /opt/cairn
installed=0
/opt/cairn/bin/pip install --no-cache-dir "$source" || installed=$?
for built in "$source"/build "$source"/*.egg-info; do # they are the clone's owner's, who may build there, too
    [ ! -e "$built" ] || chown -R --reference="$source" "$built"
done
[ "$installed" = 0 ] || fail "not installed, because of pip's error above: do what it says, then run this again"

# It keeps nothing, and looks at the disk and the settings that the service will have.
printf '%s\n' "$invite" | CAIRN_HOME=/var/lib/cairn /opt/cairn/bin/cairn peer doctor - ||
    fail "not joined, because of the line above that says no, or the error: do what it says, then run this again"

printf '%s\n' "$invite" | install -D -m 600 /dev/stdin /etc/cairn/invite
install -m 644 "$source/deploy/cairn-peer.service" "$unit"
if [ -n "$hook" ]; then
    install -m 755 "$source/deploy/preempted/$hook.sh" /etc/cairn/preempted
    install -m 644 "$source/deploy/cairn-preemption.service" /etc/systemd/system/cairn-preemption.service
fi
systemctl daemon-reload
[ -z "$hook" ] || systemctl enable cairn-preemption
systemctl enable --now cairn-peer
echo "joined, and joins at each boot; its log: journalctl -fu cairn-peer"
