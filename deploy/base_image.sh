#!/usr/bin/env bash
# Make a base image from Debian's packages, where the one of the Dockerfile cannot be fetched: base_image.sh TAG
# Needs mmdebstrap, root and docker. The machine's certificates go in as well, for a package index behind a proxy.
set -euo pipefail

tag=${1:?the tag of the image}
release=bookworm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

certificates=/etc/ssl/certs/ca-certificates.crt
printf '[global]\ncert = %s\n' "$certificates" >"$work/pip.conf"
cat >"$work/lean" <<'EOF'
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb"; };
EOF
slim=()
for folder in doc man locale info lintian; do
  slim+=(--dpkgopt="path-exclude=/usr/share/$folder/*")
done
mmdebstrap --quiet --variant=minbase --include=ca-certificates "${slim[@]}" \
  --customize-hook="upload $certificates $certificates" \
  --customize-hook="upload $work/pip.conf /etc/pip.conf" \
  --customize-hook="upload $work/lean /etc/apt/apt.conf.d/lean" \
  --customize-hook='rm -rf "$1"/var/cache/apt/*' \
  "$release" "$work/base.tar"
docker import "$work/base.tar" "$tag" >/dev/null
echo "$tag: Debian $(tar --extract --to-stdout --file "$work/base.tar" ./etc/debian_version)"
