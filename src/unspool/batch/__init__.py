"""Files of prompts: read line by line, answered by the engine, written as they finish, resumed after any end."""
