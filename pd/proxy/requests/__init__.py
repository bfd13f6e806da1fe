"""The bodies of requests: for each endpoint its fields with type, bounds, default and meaning.

What depends on the model that is served is checked later: ranges of sampling parameters by
:meth:`pd.core.sampling_params.SamplingParams.validate` (the models describe the same ranges), token
ids and lengths by :mod:`pd.proxy.service`.
"""
