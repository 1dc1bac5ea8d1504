"""A URL that lets its holder make one request to an S3 bucket, and no other: Signature Version 4, in the query.

Invariant: what is signed must be sent exactly so. A PUT that signs its length, its SHA-256 and `if-none-match: *` can store
that one content under that one name, once. Pure functions; the clock is an argument. Called by `bucket`.
Source: AWS, "Authenticating Requests: Using Query Parameters". Left out: headers whose values need folding of spaces.
"""

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True)
class Credentials:
    key_id: str
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)  # of temporary ones


def presigned(
    method: str,
    url: str,
    headers: Mapping[str, str],
    *,
    credentials: Credentials,
    region: str,
    now_s: float,
    expires_s: int,
) -> str:
    """`url`, whose path is percent-encoded, with the signature; the request must carry `headers`, in lower case."""
    parts = urlsplit(url)
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    signed = dict(sorted((dict(headers) | {"host": parts.netloc}).items()))
    names = ";".join(signed)
    query = {
        "X-Amz-Algorithm": ALGORITHM,
        "X-Amz-Credential": f"{credentials.key_id}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(expires_s),
        "X-Amz-SignedHeaders": names,
    }
    if credentials.token:
        query["X-Amz-Security-Token"] = credentials.token
    asked = "&".join(f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in sorted(query.items()))
    lines = [f"{name}:{value}" for name, value in signed.items()]
    request = "\n".join([method, parts.path, asked, *lines, "", names, "UNSIGNED-PAYLOAD"])
    text = "\n".join([ALGORITHM, moment, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{credentials.secret}".encode()
    for word in (moment[:8], region, "s3", "aws4_request"):
        key = hmac.digest(key, word.encode(), hashlib.sha256)
    signature = hmac.digest(key, text.encode(), hashlib.sha256).hex()
    return f"{url}?{asked}&X-Amz-Signature={signature}"
