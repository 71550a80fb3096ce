// Commands of LaTeX that stand for one character, or for a name that is written upright.

const table = (text) => new Map(text.trim().split(/\s+/).map((entry) => entry.split("=")));

/** Letters. */
export const LETTERS = table(`
alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ vartheta=ϑ iota=ι kappa=κ lambda=λ mu=μ nu=ν xi=ξ
pi=π varpi=ϖ rho=ρ varrho=ϱ sigma=σ varsigma=ς tau=τ upsilon=υ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω
Gamma=Γ Delta=Δ Theta=Θ Lambda=Λ Xi=Ξ Pi=Π Sigma=Σ Upsilon=Υ Phi=Φ Psi=Ψ Omega=Ω
infty=∞ partial=∂ nabla=∇ ell=ℓ hbar=ℏ Re=ℜ Im=ℑ aleph=ℵ emptyset=∅ varnothing=∅ imath=ı jmath=ȷ wp=℘ top=⊤ bot=⊥ angle=∠
degree=° ldots=… dots=… cdots=⋯ vdots=⋮ ddots=⋱ dotsc=… dotsb=⋯ prime=′ square=□ blacksquare=■ triangle=△ checkmark=✓`);

/** Operators and relations. */
export const OPERATORS = table(`
times=× cdot=⋅ div=÷ pm=± mp=∓ ast=∗ star=⋆ circ=∘ bullet=∙ oplus=⊕ ominus=⊖ otimes=⊗ odot=⊙ cap=∩ cup=∪ setminus=∖ wedge=∧ land=∧
vee=∨ lor=∨ neg=¬ lnot=¬ dagger=† amalg=⨿
le=≤ leq=≤ leqslant=≤ ge=≥ geq=≥ geqslant=≥ ne=≠ neq=≠ equiv=≡ approx=≈ cong=≅ sim=∼ simeq=≃ propto=∝ ll=≪ gg=≫ prec=≺ succ=≻ asymp=≍
doteq=≐ triangleq=≜ coloneqq=≔ in=∈ notin=∉ ni=∋ subset=⊂ supset=⊃ subseteq=⊆ supseteq=⊇ subsetneq=⊊ mid=∣ nmid=∤ parallel=∥ perp=⟂
models=⊨ vdash=⊢ forall=∀ exists=∃ nexists=∄ therefore=∴ because=∵
to=→ rightarrow=→ leftarrow=← gets=← leftrightarrow=↔ Rightarrow=⇒ Leftarrow=⇐ Leftrightarrow=⇔ implies=⟹ impliedby=⟸ iff=⟺ mapsto=↦
longrightarrow=⟶ longleftarrow=⟵ Longrightarrow=⟹ uparrow=↑ downarrow=↓ hookrightarrow=↪ rightharpoonup=⇀ rightleftharpoons=⇌ nearrow=↗ searrow=↘
colon=: lt=< gt=> backslash=\\`);

/** Operators that are large, with limits above and below in formulas that stand alone. */
export const LARGE = table("sum=∑ prod=∏ coprod=∐ bigcup=⋃ bigcap=⋂ bigoplus=⨁ bigotimes=⨂ bigvee=⋁ bigwedge=⋀");

/** Integrals have their limits beside. */
export const INTEGRALS = table("int=∫ iint=∬ iiint=∭ oint=∮");

/** Names of functions; those of the second have limits below. */
export const FUNCTIONS = new Set(("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker "
  + "Pr gcd det").split(" "));
export const LIMITED = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));

/** What stands at the sides of a group. */
export const FENCES = table(String.raw`
lbrace={ rbrace=} langle=⟨ rangle=⟩ lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ vert=| Vert=‖ lvert=| rvert=| lVert=‖ rVert=‖ lbrack=[ rbrack=]`);

/** Marks above or below: character, and whether it grows with what it marks. */
export const ACCENTS = {
  hat: ["^", false], widehat: ["^", true], bar: ["‾", false], overline: ["‾", true], vec: ["→", false], overrightarrow: ["→", true],
  dot: ["˙", false], ddot: ["¨", false], tilde: ["~", false], widetilde: ["~", true], check: ["ˇ", false], breve: ["˘", false],
  overbrace: ["⏞", true],
};
export const BELOW = { underline: "_", underbrace: "⏟" };

/** Widths of blanks, in em. */
export const BLANKS = { ",": 0.17, ":": 0.22, ";": 0.28, " ": 0.33, "!": -0.17, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.17 };

/** Alphabets: where capital letters, small ones and digits begin in Unicode (0: there are none), and exceptions. */
export const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, 0x1d7d8, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathbf: [0x1d400, 0x1d41a, 0x1d7ce, {}],
  boldsymbol: [0x1d468, 0x1d482, 0x1d7ce, {}],
  mathcal: [0x1d49c, 0x1d4b6, 0, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, 0, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2, {}],
  mathtt: [0x1d670, 0x1d68a, 0x1d7f6, {}],
};
ALPHABETS.bm = ALPHABETS.boldsymbol;
ALPHABETS.mathscr = ALPHABETS.mathcal;
