"""A chain of LangChain on pd, with nothing of ours in between.

pip install langchain-openai
python langchain_chain.py http://127.0.0.1:8000
"""

from __future__ import annotations

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def main(url: str) -> None:
    model = ChatOpenAI(model="embedded", base_url=f"{url}/v1", api_key="none", temperature=0)
    ask = ChatPromptTemplate.from_messages(
        [("system", "You are a helpful assistant."), ("user", "{question}")]
    )
    chain = ask | model | StrOutputParser()
    questions = [{"question": "What is the KV cache?"}, {"question": "What is 12 + 30?"}]
    for answer in chain.batch(questions):
        print(answer)
    print("".join(chain.stream({"question": "What is a unified node?"})))
    extract = model.with_structured_output(Person, method="json_schema")
    sentence = "Anna Berg is a nurse from Oslo and is 33 years old."
    print(extract.invoke(f"Extract name, age as JSON: {sentence}"))


if __name__ == "__main__":
    main(sys.argv[1])
