"""What layers and models that draft have on disk beside the roles of other layers."""

from __future__ import annotations

from quire.model.role import Role

OWN_LAYER = {
    "mtp_join": Role("linear", lambda s: (s.hidden, 2 * s.hidden), layer=False, optional=True),
    "mtp_token_norm": Role("vector", lambda s: (s.hidden,), layer=False, optional=True),
    "mtp_hidden_norm": Role("vector", lambda s: (s.hidden,), layer=False, optional=True),
}
"""Of a layer that predicts further tokens (`families.mtp`)."""
ASSISTANT = {
    "assistant_in": Role("linear", lambda s: (s.hidden, 2 * s.assistant.width), layer=False, optional=True),
    "assistant_out": Role("linear", lambda s: (s.assistant.width, s.hidden), layer=False, optional=True),
    "centroids": Role("dense", lambda s: (s.assistant.clusters, s.hidden), layer=False, optional=True),
}
"""Of a model that drafts for another (`families.assistants`)."""
ROLES = OWN_LAYER | ASSISTANT
