#!/usr/bin/env bash
# Packages of the distribution, without the services that they would start: `install.sh PACKAGE...`, as root.
# Debian asks policy-rc.d before it starts a service; 101 is "no". What was there before is put back.
set -euo pipefail
POLICY=${POLICY:-/usr/sbin/policy-rc.d}

exec 9<"$0"; flock 9  # another that installs would take our policy for the machine's own
restore() { rm -f "$POLICY"; [ ! -e "$POLICY.before" ] || mv "$POLICY.before" "$POLICY"; }
trap restore EXIT
trap 'exit 130' INT TERM
[ ! -e "$POLICY" ] || mv "$POLICY" "$POLICY.before"
printf '#!/bin/sh\nexit 101\n' >"$POLICY"
chmod 755 "$POLICY"
apt-get update
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "$@"
