"""Facts about the world: countries, and landmarks with the cities they stand in.

One line per country: name, capital, a language, currency, continent. Where a country has several languages, the one
given is official there or the most spoken. Currencies are short English names. A dash: the continent is debated.
"""

from dataclasses import dataclass

_COUNTRIES = """
France | Paris | French | euro | Europe
Germany | Berlin | German | euro | Europe
Italy | Rome | Italian | euro | Europe
Spain | Madrid | Spanish | euro | Europe
Portugal | Lisbon | Portuguese | euro | Europe
Greece | Athens | Greek | euro | Europe
Austria | Vienna | German | euro | Europe
Ireland | Dublin | English | euro | Europe
Finland | Helsinki | Finnish | euro | Europe
Belgium | Brussels | Dutch | euro | Europe
Slovakia | Bratislava | Slovak | euro | Europe
Slovenia | Ljubljana | Slovenian | euro | Europe
Estonia | Tallinn | Estonian | euro | Europe
Latvia | Riga | Latvian | euro | Europe
Lithuania | Vilnius | Lithuanian | euro | Europe
Croatia | Zagreb | Croatian | euro | Europe
Malta | Valletta | Maltese | euro | Europe
Montenegro | Podgorica | Montenegrin | euro | Europe
Bulgaria | Sofia | Bulgarian | euro | Europe
Poland | Warsaw | Polish | zloty | Europe
Hungary | Budapest | Hungarian | forint | Europe
Romania | Bucharest | Romanian | leu | Europe
Moldova | Chisinau | Romanian | leu | Europe
Sweden | Stockholm | Swedish | krona | Europe
Norway | Oslo | Norwegian | krone | Europe
Denmark | Copenhagen | Danish | krone | Europe
Iceland | Reykjavik | Icelandic | krona | Europe
Switzerland | Bern | German | franc | Europe
Serbia | Belgrade | Serbian | dinar | Europe
Albania | Tirana | Albanian | lek | Europe
Ukraine | Kyiv | Ukrainian | hryvnia | Europe
Russia | Moscow | Russian | ruble | -
Belarus | Minsk | Russian | ruble | Europe
England | London | English | pound | Europe
Scotland | Edinburgh | English | pound | Europe
Wales | Cardiff | English | pound | Europe
Turkey | Ankara | Turkish | lira | -
Georgia | Tbilisi | Georgian | lari | -
Armenia | Yerevan | Armenian | dram | -
Azerbaijan | Baku | Azerbaijani | manat | -
Iran | Tehran | Persian | rial | Asia
Iraq | Baghdad | Arabic | dinar | Asia
Syria | Damascus | Arabic | pound | Asia
Lebanon | Beirut | Arabic | pound | Asia
Jordan | Amman | Arabic | dinar | Asia
Qatar | Doha | Arabic | riyal | Asia
Oman | Muscat | Arabic | rial | Asia
Bahrain | Manama | Arabic | dinar | Asia
Yemen | Sanaa | Arabic | rial | Asia
Afghanistan | Kabul | Dari | afghani | Asia
Pakistan | Islamabad | Urdu | rupee | Asia
India | New Delhi | Hindi | rupee | Asia
Nepal | Kathmandu | Nepali | rupee | Asia
Bhutan | Thimphu | Dzongkha | ngultrum | Asia
Bangladesh | Dhaka | Bengali | taka | Asia
the Maldives | Male | Dhivehi | rufiyaa | Asia
China | Beijing | Mandarin | yuan | Asia
Mongolia | Ulaanbaatar | Mongolian | tugrik | Asia
Japan | Tokyo | Japanese | yen | Asia
Taiwan | Taipei | Mandarin | dollar | Asia
Vietnam | Hanoi | Vietnamese | dong | Asia
Laos | Vientiane | Lao | kip | Asia
Malaysia | Kuala Lumpur | Malay | ringgit | Asia
Thailand | Bangkok | Thai | baht | Asia
the Philippines | Manila | Filipino | peso | Asia
Uzbekistan | Tashkent | Uzbek | som | Asia
Kazakhstan | Astana | Kazakh | tenge | -
Kyrgyzstan | Bishkek | Kyrgyz | som | Asia
Tajikistan | Dushanbe | Tajik | somoni | Asia
Turkmenistan | Ashgabat | Turkmen | manat | Asia
Egypt | Cairo | Arabic | pound | Africa
Libya | Tripoli | Arabic | dinar | Africa
Tunisia | Tunis | Arabic | dinar | Africa
Algeria | Algiers | Arabic | dinar | Africa
Morocco | Rabat | Arabic | dirham | Africa
Sudan | Khartoum | Arabic | pound | Africa
Ethiopia | Addis Ababa | Amharic | birr | Africa
Eritrea | Asmara | Tigrinya | nakfa | Africa
Somalia | Mogadishu | Somali | shilling | Africa
Kenya | Nairobi | Swahili | shilling | Africa
Uganda | Kampala | English | shilling | Africa
Tanzania | Dodoma | Swahili | shilling | Africa
Rwanda | Kigali | Kinyarwanda | franc | Africa
Zambia | Lusaka | English | kwacha | Africa
Malawi | Lilongwe | English | kwacha | Africa
Namibia | Windhoek | English | dollar | Africa
Botswana | Gaborone | Tswana | pula | Africa
Angola | Luanda | Portuguese | kwanza | Africa
Mozambique | Maputo | Portuguese | metical | Africa
Madagascar | Antananarivo | Malagasy | ariary | Africa
Nigeria | Abuja | English | naira | Africa
Ghana | Accra | English | cedi | Africa
Senegal | Dakar | French | franc | Africa
Mali | Bamako | Bambara | franc | Africa
Niger | Niamey | Hausa | franc | Africa
Togo | Lome | French | franc | Africa
Cameroon | Yaounde | French | franc | Africa
Gabon | Libreville | French | franc | Africa
Guinea | Conakry | French | franc | Africa
Liberia | Monrovia | English | dollar | Africa
the Gambia | Banjul | English | dalasi | Africa
Canada | Ottawa | English | dollar | North America
the United States | Washington | English | dollar | North America
Mexico | Mexico City | Spanish | peso | North America
Cuba | Havana | Spanish | peso | North America
Jamaica | Kingston | English | dollar | North America
Honduras | Tegucigalpa | Spanish | lempira | North America
Nicaragua | Managua | Spanish | cordoba | North America
Colombia | Bogota | Spanish | peso | South America
Venezuela | Caracas | Spanish | bolivar | South America
Ecuador | Quito | Spanish | dollar | South America
Peru | Lima | Spanish | sol | South America
Chile | Santiago | Spanish | peso | South America
Uruguay | Montevideo | Spanish | peso | South America
Paraguay | Asuncion | Spanish | guarani | South America
Brazil | Brasilia | Portuguese | real | South America
Argentina | Buenos Aires | Spanish | peso | South America
the Bahamas | Nassau | English | dollar | North America
Australia | Canberra | English | dollar | Oceania
New Zealand | Wellington | English | dollar | Oceania
Fiji | Suva | English | dollar | Oceania
Samoa | Apia | Samoan | tala | Oceania
"""

# A landmark with its city; "the" in front where English puts it.
_LANDMARKS = """
the Eiffel Tower | Paris
the Louvre | Paris
the Moulin Rouge | Paris
the Pompidou Centre | Paris
the Colosseum | Rome
the Trevi Fountain | Rome
the Spanish Steps | Rome
the Pantheon | Rome
the Brandenburg Gate | Berlin
the Reichstag | Berlin
Checkpoint Charlie | Berlin
Big Ben | London
Buckingham Palace | London
Tower Bridge | London
Trafalgar Square | London
Hyde Park | London
the Prado | Madrid
the Acropolis | Athens
the Parthenon | Athens
Red Square | Moscow
the Kremlin | Moscow
the Bolshoi Theatre | Moscow
the Hermitage | Saint Petersburg
the Blue Mosque | Istanbul
the Hagia Sophia | Istanbul
the Grand Bazaar | Istanbul
the Taj Mahal | Agra
the Red Fort | Delhi
the Forbidden City | Beijing
the Temple of Heaven | Beijing
the Oriental Pearl Tower | Shanghai
Shibuya Crossing | Tokyo
the Meiji Shrine | Tokyo
the Golden Pavilion | Kyoto
the Emerald Buddha | Bangkok
the Burj Khalifa | Dubai
Bondi Beach | Sydney
the Harbour Bridge | Sydney
the Statue of Liberty | New York
Times Square | New York
Central Park | New York
the Empire State Building | New York
the White House | Washington
the Lincoln Memorial | Washington
the Space Needle | Seattle
the Willis Tower | Chicago
Fenway Park | Boston
the Hollywood Sign | Los Angeles
the Golden Gate Bridge | San Francisco
the Sagrada Familia | Barcelona
Park Guell | Barcelona
the Camp Nou | Barcelona
the Alhambra | Granada
the Uffizi Gallery | Florence
the Ponte Vecchio | Florence
the Rialto Bridge | Venice
the Bridge of Sighs | Venice
the Leaning Tower | Pisa
the Sforza Castle | Milan
the Charles Bridge | Prague
the Belvedere Palace | Vienna
the Chain Bridge | Budapest
the Little Mermaid | Copenhagen
Tivoli Gardens | Copenhagen
the Anne Frank House | Amsterdam
the Rijksmuseum | Amsterdam
the Atomium | Brussels
the Belem Tower | Lisbon
the Royal Mile | Edinburgh
the Vasa Museum | Stockholm
the Munch Museum | Oslo
Table Mountain | Cape Town
the Great Sphinx | Giza
the Gateway of India | Mumbai
the Merlion | Singapore
the Petronas Towers | Kuala Lumpur
Copacabana Beach | Rio
Sugarloaf Mountain | Rio
the Colon Theatre | Buenos Aires
"""


@dataclass(frozen=True, slots=True)
class Country:
    """A country and what is known about it; `name` has "the" in front where English needs it."""

    name: str
    capital: str
    language: str
    currency: str
    continent: str | None


@dataclass(frozen=True, slots=True)
class Landmark:
    """A landmark and the city it stands in; `name` has "the" in front where English needs it."""

    name: str
    city: str


def _rows(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")] for line in table.strip().splitlines()]


COUNTRIES = [
    Country(name, capital, language, currency, None if continent == "-" else continent)
    for name, capital, language, currency, continent in _rows(_COUNTRIES)
]
LANDMARKS = [Landmark(name, city) for name, city in _rows(_LANDMARKS)]
