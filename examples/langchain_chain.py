"""A langchain chain whose model is the mesh: prompt template, model, parser.

pip install langchain-openai
"""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

URL = os.environ.get("PDMESH_URL", "http://127.0.0.1:8000")
model = ChatOpenAI(
    model=os.environ.get("PDMESH_MODEL_NAME", "demo"),
    base_url=URL + "/v1",
    api_key=os.environ.get("PDMESH_API_KEY", "none"),
    temperature=0,
    stream_usage=True,
)
prompt = ChatPromptTemplate([("human", "{notes} What is the code of the {thing}?")])
chain = prompt | model | StrOutputParser()

notes = "The code of the red door is 4821. The code of the blue lift is 5044."
for piece in chain.stream({"notes": notes, "thing": "red door"}):
    print(piece, end="", flush=True)
print()
for answer in chain.batch([{"notes": notes, "thing": it} for it in ("blue lift", "red door")]):
    print(answer)
