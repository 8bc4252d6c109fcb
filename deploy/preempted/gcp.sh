#!/bin/sh
# Ends with 0 once Google has announced that it takes this spot VM back. No answer is no notice.
preempted=$(curl --silent --fail --noproxy '*' --max-time 2 --header 'Metadata-Flavor: Google' \
    "${CAIRN_METADATA:-http://169.254.169.254}/computeMetadata/v1/instance/preempted") && [ "$preempted" = TRUE ]
