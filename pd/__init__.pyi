from pd.offline import LLM as LLM
from pd.offline import CompletionOutput as CompletionOutput
from pd.offline import Engine as Engine
from pd.offline import Logprob as Logprob
from pd.offline import RequestOutput as RequestOutput
from pd.offline import SamplingParams as SamplingParams
from pd.offline import StructuredOutputsParams as StructuredOutputsParams

__version__: str
