-- Asks headgate about a request: `http-request lua.headgate RULE` in haproxy.cfg, by way of the proxy `headgate` there,
-- which has the time-outs and the connections, and knows when headgate is down.
--
--   txn.headgate            allowed, denied, unclear (the rule wants a header that the client did not send), or
--                           away (headgate is down, slow or set up wrongly)
--   txn.headgate_retry      seconds until a denied client may come back
--   txn.headgate_limit, txn.headgate_remaining, txn.headgate_reset      for the X-RateLimit headers

local door = "abns@headgate" -- where that proxy listens
local url = "http://127.0.0.1/api/v1/rate-limit/forward/"

local answers = { [200] = "allowed", [429] = "denied", [400] = "unclear" }
local variables = {
  ["retry-after"] = "txn.headgate_retry",
  ["x-ratelimit-limit"] = "txn.headgate_limit",
  ["x-ratelimit-remaining"] = "txn.headgate_remaining",
  ["x-ratelimit-reset"] = "txn.headgate_reset",
}

core.register_action("headgate", { "http-req" }, function(txn, rule)
  -- Only these headers are sent, so the client cannot name its own address, or a token.
  local headers = {
    ["x-forwarded-for"] = { txn.sf:src() },
    ["x-forwarded-host"] = { txn.sf:req_hdr("host") },
    ["x-forwarded-method"] = { txn.sf:method() },
    ["x-forwarded-uri"] = { txn.sf:pathq() },
    -- ["x-api-key"] = { txn.sf:req_hdr("x-api-key") }, -- for a rule with header:X-Api-Key
    -- ["authorization"] = { "Bearer ..." }, -- when headgate asks for a token
  }
  local answer = core.httpclient():get({ url = url .. rule, dst = door, headers = headers })
  txn:set_var("txn.headgate", answer and answers[answer.status] or "away")
  for name, variable in pairs(variables) do
    local lines = answer and answer.headers and answer.headers[name]
    if lines then
      txn:set_var(variable, lines[0])
    end
  end
end, 1)
