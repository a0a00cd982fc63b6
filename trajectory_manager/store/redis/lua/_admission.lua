-- Admission: how many groups may be admitted and not yet leased to a step.

-- Whether groups may be admitted for the step after the next one: not while a step is trained, unless the publish
-- waits for them (WAIT). See RunConfig.max_outstanding_groups.
local function admits_ahead(rules, training)
  local WAIT = 2
  return rules.staleness_policy == WAIT or not training
end

-- The limit without max_stored_tokens.
local function staleness_limit(rules, training)
  return rules.groups_per_step * (rules.max_staleness + (admits_ahead(rules, training) and 1 or 0))
end

-- The limit with it. With retention the next commit frees tokens, so the next step's groups stay admissible:
-- otherwise admission would never reopen.
local function admission_limit(rules, training, stored_tokens)
  local limit = staleness_limit(rules, training)
  if rules.max_stored_tokens == 0 or stored_tokens <= rules.max_stored_tokens then return limit end
  return rules.retention_steps > 0 and math.min(limit, rules.groups_per_step) or 0
end
