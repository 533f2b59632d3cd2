#!/usr/bin/env bash
# Install packages of the distribution without starting their services: `install.sh PACKAGE...`, as root.
# Debian calls policy-rc.d before it starts a service; exit code 101 denies it. An existing policy is restored.
set -euo pipefail
POLICY=${POLICY:-/usr/sbin/policy-rc.d}

exec 9<"$0"; flock 9  # a concurrent install would mistake our policy for the machine's
restore() { rm -f "$POLICY"; [ ! -e "$POLICY.before" ] || mv "$POLICY.before" "$POLICY"; }
trap restore EXIT
trap 'exit 130' INT TERM
[ ! -e "$POLICY" ] || mv "$POLICY" "$POLICY.before"
printf '#!/bin/sh\nexit 101\n' >"$POLICY"
chmod 755 "$POLICY"
apt-get -o DPkg::Lock::Timeout=300 update
DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@"
