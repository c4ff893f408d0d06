-- For wrk: replays whole HTTP requests from a file, and counts answers without the wanted text.
-- The file: for each request its length on a line, then its bytes (corpus.py writes it).
local requests, at, threads = {}, 0, {}

function setup(thread)
  threads[#threads + 1] = thread
end

function init(arguments)
  wanted, failed = arguments[2], 0
  local file = assert(io.open(arguments[1], "rb"))
  for length in function() return file:read("*l") end do
    requests[#requests + 1] = file:read(tonumber(length))
  end
  file:close()
end

function request()
  at = at % #requests + 1
  return requests[at]
end

function response(status, _, body)
  if status ~= 200 or not body:find(wanted, 1, true) then failed = failed + 1 end
end

function done(summary)
  local errors = summary.errors.connect + summary.errors.read + summary.errors.write
    + summary.errors.timeout
  for _, thread in ipairs(threads) do errors = errors + thread:get("failed") end
  print(string.format("counted %d %d %d", summary.requests, errors, summary.duration))
end
