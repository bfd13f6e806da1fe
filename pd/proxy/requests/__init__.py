"""Bodies of requests: the fields of each endpoint with types, bounds, defaults and descriptions.

Checks that depend on the model come later: :meth:`pd.core.sampling_params.SamplingParams.validate`
checks the ranges of sampling parameters (the models describe the same ranges), and
:mod:`pd.proxy.api.prompts` checks token ids and lengths.
"""
