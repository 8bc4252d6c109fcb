#!/bin/sh
# Ends with 0 once AWS has announced that it takes this spot instance back (IMDSv2). No answer is no notice.
metadata=${CAIRN_METADATA:-http://169.254.169.254}/latest
ask() { curl --silent --fail --noproxy '*' --max-time 2 "$@"; }

token=$(ask --request PUT --header 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/api/token") || exit 1
code=$(ask --output /dev/null --write-out '%{http_code}' --header "X-aws-ec2-metadata-token: $token" \
    "$metadata/meta-data/spot/instance-action") && [ "$code" = 200 ]
