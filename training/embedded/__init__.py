"""Makes the embedded model: its skills, data, training and evaluation.

``text``, ``skills``, ``faq`` and ``heldout`` need the standard library alone, so that
``training/evaluate_model.py`` runs anywhere; the rest makes the model.
"""
