"""An MCP server that violates the protocol. It writes JSON-RPC itself, since the official server would not."""

import json
import os
import sys
import threading
import time

ANY = {"type": "object", "properties": {}}
BROKEN = {"type": "object", "properties": {"a": {"type": "zzz"}}}
UNKNOWN = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}
PROMISED = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [{"name": name, "inputSchema": ANY} for name in ("pid", "first", "slow", "large", "parts", "garbage", "raw")]
TOOLS += [{"name": "liar", "inputSchema": ANY, "outputSchema": PROMISED}, {"name": "unknown", "inputSchema": UNKNOWN}]
TOOLS += [{"name": "broken", "inputSchema": BROKEN}] * ("--broken-schema" in sys.argv)
lock = threading.Lock()
methods = []  # of all requests so far


def write(line):
    with lock:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def send(message):
    write(json.dumps(message))


def answer(number, name, arguments):
    texts = {"pid": str(os.getpid()), "first": methods[0], "slow": "slept"}
    text = texts.get(name, "x" * int(arguments.get("bytes", 1)))
    result = {"content": [{"type": "text", "text": text}], "isError": False}
    match name:
        case "slow":
            time.sleep(1.0)
        case "liar":
            result["structuredContent"] = {"x": "no integer"}
        case "parts":
            result["content"] = [{"type": "text", "text": ""}] * int(arguments["count"])
        case "raw":
            with lock:
                sys.stdout.buffer.write(bytes.fromhex(arguments["hex"]).replace(b"$ID", str(number).encode()))
                sys.stdout.buffer.flush()
        case "garbage":
            return write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result})[:-5])
    return send({"jsonrpc": "2.0", "id": number, "result": result})


for line in sys.stdin:
    message = json.loads(line)
    number, method = message.get("id"), message.get("method")
    methods.append(method)
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "careless", "version": "1"}}
        send({"jsonrpc": "2.0", "id": number, "result": {"protocolVersion": version, **about}})
    elif method == "tools/list":
        send({"jsonrpc": "2.0", "id": number, "result": {"tools": TOOLS}})
    elif method == "tools/call":
        called = message["params"]
        arguments = (number, called["name"], called.get("arguments") or {})
        threading.Thread(target=answer, args=arguments, daemon=True).start()
    elif number is not None:
        send({"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no such method"}})
