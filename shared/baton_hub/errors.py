"""The errors for the user, and the translation of huggingface_hub's failures into them."""

import http
import os

import httpx2
from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .model_id import HubModel

_LONGEST_REASON = 200  # characters of a server's text that an error repeats


class HubError(Exception):
    """A model cannot be downloaded. The message is for the user."""


class HubUnreachable(HubError):
    """The hub did not answer, or its use is turned off. A copy in the cache may serve instead."""


def explain(error: Exception, model: HubModel) -> HubError:
    """Return the error that tells the user what failed while a model was downloaded, and what to do."""
    page = f"{constants.ENDPOINT}/{model.repo}"
    if isinstance(error, OfflineModeIsEnabled):
        return HubUnreachable(f"HF_HUB_OFFLINE is set, and the cache does not hold all that is needed of {model}")
    if isinstance(error, GatedRepoError):
        return HubError(f"{model.repo} is gated: accept its terms at {page}. {_about_token()}")
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{page} has no revision {model.revision!r}")
    if isinstance(error, RepositoryNotFoundError):
        return HubError(f"there is no model at {page}, or it is private. {_about_token()}")
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, model, page)
    if isinstance(error, httpx2.TransportError):
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
        return HubUnreachable(f"cannot reach {_host(error)} to download {model} ({reason})")
    return HubError(f"{page} gives no usable answer ({type(error).__name__}: {str(error)[:_LONGEST_REASON]})")


def _explain_status(error: HfHubHTTPError, model: HubModel, page: str) -> HubError:
    # The text of the error is not shown as it is, because the URL in it may contain a signature that grants access.
    status = error.response.status_code
    if status == http.HTTPStatus.UNAUTHORIZED and get_token() is None:
        return HubError(f"there is no model at {page}, or it is private or gated. {_about_token()}")
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        return HubError(f"{constants.ENDPOINT} does not let this token read {model.repo}. {_about_token()}")
    reason = (error.server_message or error.response.reason_phrase)[:_LONGEST_REASON]
    text = f"{error.response.url.host} answers {status} ({reason}) to a request for {model}"
    busy = status == http.HTTPStatus.TOO_MANY_REQUESTS or status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
    return HubUnreachable(text) if busy else HubError(text)


def _about_token() -> str:
    if get_token() is None:
        return "No token was sent: set HF_TOKEN to one of an account that may read the model"
    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else constants.HF_TOKEN_PATH
    return f"The token of {source} was sent, and it must belong to an account that may read the model"


def _host(error: httpx2.TransportError) -> str:
    try:
        return error.request.url.host
    except RuntimeError:  # no request is attached
        return constants.ENDPOINT
