// Presets: one for each way of decoding, with a prompt that shows what it is good for.

const STORY = "The lighthouse keeper opened the door and saw";
const FACT = "The capital of Australia is the city of";
const COPY =
  "Mix two cups of flour with one cup of water. Bake the bread for forty minutes.\n" +
  "Mix three cups of flour with one cup of milk. Bake the cake for thirty minutes.\n" +
  "Mix four cups of flour";

export const PRESETS = [
  {
    name: "Greedy",
    about: "Always the likeliest token.",
    prompt: STORY,
    settings: { do_sample: false },
  },
  {
    name: "Sampling, top-p 0.9",
    about: "Draw from the likeliest tokens that together hold 90 % of the probability.",
    prompt: "The capital of France is",
    settings: { do_sample: true, temperature: 1, top_p: 0.9, seed: 5, max_new_tokens: 32 },
  },
  {
    name: "Sampling, min-p 0.1",
    about: "Draw from tokens that are at least a tenth as likely as the likeliest.",
    prompt: STORY,
    settings: { do_sample: true, temperature: 1.2, min_p: 0.1, seed: 7 },
  },
  {
    name: "Temperature and top-k",
    about: "Sharpen the distribution, and keep the 40 likeliest tokens.",
    prompt: STORY,
    settings: { do_sample: true, temperature: 0.7, top_k: 40, seed: 7 },
  },
  {
    name: "Beam search",
    about: "Keep the four best texts at every step, and return the best at the end.",
    prompt: STORY,
    settings: { num_beams: 4, do_sample: false, max_new_tokens: 24 },
  },
  {
    name: "Diverse beams",
    about: "Three groups of beams, each punished for repeating the others.",
    prompt: STORY,
    settings: { num_beams: 6, num_beam_groups: 3, diversity_penalty: 1.5, do_sample: false, max_new_tokens: 20 },
  },
  {
    name: "Forced words",
    about: "Beam search that must write these phrases somewhere.",
    prompt: STORY,
    settings: { num_beams: 5, force_words: [" a storm", " the sea"], do_sample: false, max_new_tokens: 24 },
  },
  {
    name: "Contrastive search",
    about: "Among the likeliest tokens, the one that is least like the text so far.",
    prompt: STORY,
    settings: { penalty_alpha: 0.6, top_k: 5, do_sample: false },
  },
  {
    name: "DoLa",
    about: "Prefer what the last layer has learned over what early layers guess.",
    prompt: FACT,
    settings: { dola_layers: "high", do_sample: false, repetition_penalty: 1.2 },
  },
  {
    name: "Guidance",
    about: "Lead away from a negative prompt.",
    prompt: "Today the weather is wonderful, and",
    settings: { guidance_scale: 2, negative_prompt: "Today the weather is terrible, and", do_sample: false },
  },
  {
    name: "Speculation",
    about: "Guess the next tokens from the text itself, and check the guesses in one pass.",
    prompt: COPY,
    settings: { prompt_lookup_num_tokens: 5, do_sample: false, max_new_tokens: 40 },
  },
  {
    name: "Watermark",
    about: "Make a secret share of the tokens likelier, so that the text can be recognised.",
    prompt: STORY,
    settings: {
      do_sample: true,
      temperature: 1,
      seed: 7,
      watermarking_config: { greenlist_ratio: 0.25, bias: 2.5 },
      max_new_tokens: 64,
    },
  },
  {
    name: "Grammar",
    about: "Only tokens that can still lead to a text of this form.",
    prompt: "A person, as JSON:",
    settings: {
      do_sample: false,
      json_schema: {
        type: "object",
        properties: { name: { type: "string", maxLength: 24 }, age: { type: "integer", minimum: 0, maximum: 120 } },
        required: ["name", "age"],
        additionalProperties: false,
      },
    },
  },
];

export const FIRST_PRESET = "Sampling, top-p 0.9";
export const DEFAULT_LENGTH = 48;

export function findPreset(name) {
  return PRESETS.find((preset) => preset.name === name) ?? null;
}

/** The settings of a preset, with the length that the page asks for by itself. */
export function presetSettings(preset) {
  return { max_new_tokens: DEFAULT_LENGTH, ...preset.settings };
}
