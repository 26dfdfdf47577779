#!/bin/sh
# What a build is stamped with: the commit, with a + if files differ from it; "unknown" outside a checkout.
commit=$(git rev-parse --short=12 HEAD 2>/dev/null) || commit=unknown
if [ "$commit" != unknown ] && ! git diff --quiet HEAD -- 2>/dev/null; then commit="$commit+"; fi
echo "STABLE_COMMIT $commit"
